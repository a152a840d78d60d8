"""What files are made of: written in one step, sealed with a checksum, and read without trust."""

"""From the captured graph to the steps that a method runs; `pipeline` lists the passes in order."""

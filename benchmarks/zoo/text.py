"""Language, speech and vision models of `transformers`, and `x-transformers`."""

from __future__ import annotations

import torch
from specimen import Specimen, specimen

TEXT = {"vocab_size": 60, "max_position_embeddings": 16, "pad_token_id": 0}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 3}
RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
IMAGE = {"image_size": 16, "patch_size": 4}
CAUSAL = {"num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip


def words(last: int | None = None) -> dict[str, torch.Tensor]:
    """Two of three sentences are shorter."""
    ids, mask = torch.randint(3, 60, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 6:] = 0
    ids[mask == 0] = 0
    if last is not None:
        ids[:, -1] = last
    return {"input_ids": ids, "attention_mask": mask}


def pixels(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(3, 3, size, size)}


def made(name: str, head: str, example: dict, **config) -> Specimen:
    import transformers

    settings = getattr(transformers, f"{name}Config")(**config)
    uncertain = settings.__dict__.pop("uncertain", ())
    return Specimen(getattr(transformers, f"{name}{head}")(settings), example, uncertain)


HF = specimen("transformers")


@HF
def bert():
    return made("Bert", "ForSequenceClassification", words(), **SMALL, **TEXT, **RATES)


@HF
def roberta():
    return made("Roberta", "ForSequenceClassification", words(), **SMALL, **TEXT | {"max_position_embeddings": 20})


@HF
def albert():
    more = {"embedding_size": 16, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return made("Albert", "ForSequenceClassification", words(), **SMALL, **TEXT, **more)


@HF
def electra():
    return made("Electra", "ForTokenClassification", words(), embedding_size=16, **SMALL, **TEXT, **RATES)


@HF
def deberta():
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
    return made("DebertaV2", "ForSequenceClassification", words(), **SMALL, **TEXT, **RATES, **more)


@HF
def distilbert():
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3}
    return made("DistilBert", "ForSequenceClassification", words(), **sizes, **TEXT)


@HF
def mpnet():
    return made("MPNet", "ForSequenceClassification", words(), **SMALL, **TEXT | {"max_position_embeddings": 20})


@HF
def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 60, "num_labels": 3}
    return made("GPT2", "ForSequenceClassification", words(), **sizes, **ENDS)


@HF
def gpt_neo():
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    rates = {"embed_dropout": 0.1, "attention_dropout": 0.1, "resid_dropout": 0.1, "num_labels": 3}
    return made("GPTNeo", "ForSequenceClassification", words(), **sizes, **rates, **TEXT, bos_token_id=1)


@HF
def opt():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "num_labels": 3}
    return made("OPT", "ForSequenceClassification", words(), word_embed_proj_dim=32, **sizes, **TEXT)


@HF
def llama():
    return made("Llama", "ForSequenceClassification", words(), **SMALL, **TEXT, **CAUSAL)


@HF
def qwen2():
    return made("Qwen2", "ForTokenClassification", words(), classifier_dropout=0.1, **SMALL, **TEXT, **CAUSAL)


@HF
def bart():
    more = {"vocab_size": 60, "max_position_embeddings": 16, "num_labels": 3, "dropout": 0.1} | ENDS
    return made("Bart", "ForSequenceClassification", words(last=2), **CODER, **more)


@HF
def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    return made("T5", "EncoderModel", words(), **sizes)


@HF
def whisper():
    more = {"num_mel_bins": 8, "max_source_positions": 10, "num_labels": 3, "dropout": 0.1, "vocab_size": 60} | ENDS
    sound = {"input_features": torch.randn(3, 8, 20)}
    return made("Whisper", "ForAudioClassification", sound, classifier_proj_size=16, **CODER, **more)


@HF
def wav2vec2():
    layers = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2}
    sizes = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
    off = {"apply_spec_augment": False, "layerdrop": 0.1}
    return made("Wav2Vec2", "ForSequenceClassification", {"input_values": torch.randn(3, 320)}, **SMALL, **layers,
                **sizes, **off, hidden_dropout=0.1, vocab_size=60)  # fmt: skip


@HF
def patchtst():
    sizes = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "num_targets": 3, "head_dropout": 0.1}
    rates = {"attention_dropout": 0.1, "ff_dropout": 0.1, "path_dropout": 0.1}
    series = {"past_values": torch.randn(3, 16, 2)}
    return made("PatchTST", "ForClassification", series, **sizes, **more, **rates)


@HF
def time_series_transformer():
    sizes = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
    series = {
        "past_values": torch.randn(3, 10),
        "past_time_features": torch.randn(3, 10, 1),
        "past_observed_mask": torch.ones(3, 10),
        "future_values": torch.randn(3, 4),
        "future_time_features": torch.randn(3, 4, 1),
    }
    return made("TimeSeriesTransformer", "Model", series, **sizes, **CODER | {"d_model": 16})


@HF
def vit():
    return made("ViT", "ForImageClassification", pixels(), **SMALL, **IMAGE, **RATES)


@HF
def beit():
    return made("Beit", "ForImageClassification", pixels(), drop_path_rate=0.1, **SMALL, **IMAGE, **RATES)


@HF
def dinov2():
    more = {"drop_path_rate": 0.1, "mlp_ratio": 2} | RATES
    sizes = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
    return made("Dinov2", "ForImageClassification", pixels(), **sizes, **IMAGE, **more)


@HF
def swin():
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "image_size": 16}
    more = {"patch_size": 2, "drop_path_rate": 0.1, "num_labels": 3} | RATES
    return made("Swin", "ForImageClassification", pixels(), **sizes, **more)


@HF
def convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3}
    return made("ConvNext", "ForImageClassification", pixels(), drop_path_rate=0.2, layer_scale_init_value=0.5, **sizes)


@HF
def segformer():
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2]}
    more = {"decoder_hidden_size": 16, "drop_path_rate": 0.1, "num_labels": 3} | RATES
    return made("Segformer", "ForSemanticSegmentation", pixels(32), **sizes, **more)


@HF
def mobilevit():
    sizes = {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "image_size": 32}
    return made("MobileViT", "ForImageClassification", pixels(64), num_attention_heads=2, num_labels=3, **sizes)


@HF
def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    found = made("ResNet", "ForImageClassification", pixels(), **sizes)
    found.uncertain = ("convolution.weight", "classifier.1.weight")
    return found


@HF
def mamba():
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 60, "use_cache": False}
    found = made("Mamba", "Model", {"input_ids": torch.randint(3, 60, (3, 7))}, **sizes)
    found.uncertain = ("out_proj.weight",)
    return found


XT = specimen("x-transformers")


@XT
def encoder():
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_dropout=0.1, ff_dropout=0.1)
    return Specimen(TransformerWrapper(num_tokens=60, max_seq_len=8, attn_layers=layers, emb_dropout=0.1),
                    torch.randint(0, 60, (3, 7)))  # fmt: skip


@XT
def rotary_decoder():
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True,
                     ff_glu=True, attn_dropout=0.1, ff_dropout=0.1)  # fmt: skip
    model = ContinuousTransformerWrapper(dim_in=6, dim_out=2, max_seq_len=8, attn_layers=layers)
    return Specimen(model, torch.randn(3, 7, 6))


@XT
def image_classifier():
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_dropout=0.1, ff_dropout=0.1, attn_qk_norm=True)
    model = ViTransformerWrapper(image_size=16, patch_size=4, num_classes=3, attn_layers=layers, emb_dropout=0.1)
    return Specimen(model, torch.randn(3, 3, 16, 16))


@XT
def alibi_decoder():
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, alibi_pos_bias=True, attn_dropout=0.1,
                     ff_relu_squared=True, ff_dropout=0.1)  # fmt: skip
    model = TransformerWrapper(num_tokens=60, max_seq_len=8, attn_layers=layers, use_abs_pos_emb=False)
    return Specimen(model, torch.randint(0, 60, (3, 7)))


CF = specimen("conformer")


@CF
def conformer():
    from conformer import Conformer

    rates = {"attn_dropout": 0.1, "ff_dropout": 0.1, "conv_dropout": 0.1}
    model = Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5, **rates)
    return Specimen(model, torch.randn(3, 10, 16), ("conv.net.2.weight", "fn.fn.net.0.weight"))


SB = specimen("speechbrain")


@SB
def x_vector():
    from speechbrain.lobes.models.Xvector import Xvector

    model = Xvector(in_channels=8, tdnn_channels=[16, 16, 32], tdnn_kernel_sizes=[3, 3, 1], tdnn_dilations=[1, 2, 1],
                    tdnn_blocks=3, lin_neurons=6)  # fmt: skip
    return Specimen(model, torch.randn(3, 20, 8), uncertain=("conv.weight",))


@SB
def ecapa_tdnn():
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(8, lin_neurons=6, channels=[16, 16, 16, 16, 48], kernel_sizes=[3, 3, 3, 3, 1],
                       dilations=[1, 2, 3, 4, 1], attention_channels=8, res2net_scale=4, se_channels=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 20, 8), uncertain=("fc.conv.weight", "asp.tdnn.conv.conv.weight"))


@SB
def transformer_encoder():
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

    model = TransformerEncoder(num_layers=2, nhead=2, d_ffn=32, d_model=16, dropout=0.1)
    return Specimen(model, torch.randn(3, 10, 16))


@SB
def conformer_encoder():
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder

    model = ConformerEncoder(num_layers=2, d_model=16, d_ffn=32, nhead=2, kernel_size=5, dropout=0.1,
                             attention_type="regularMHA")  # fmt: skip
    return Specimen(model, torch.randn(3, 10, 16))

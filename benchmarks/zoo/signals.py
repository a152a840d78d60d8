"""Time series and brain signals: darts, neuralforecast, tsai, braindecode."""

from __future__ import annotations

import torch
from specimen import Specimen, specimen, without_compiled_operators
from torch import nn

DARTS = specimen("darts")
LENGTHS = {"input_chunk_length": 12, "output_chunk_length": 4}


class Fed(nn.Module):
    """A module of darts with the one series it is given, in the class it wants its arguments in."""

    def __init__(self, module: nn.Module, wrap) -> None:
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, past):
        return self.module(self.wrap(past_target=past))


def darts_module(file: str, name: str, channels: int, **options) -> Specimen:
    import importlib

    from darts.utils.data.torch_datasets.utils import PLModuleInput

    module = importlib.import_module(f"darts.models.forecasting.{file}")
    return Specimen(Fed(getattr(module, name)(**LENGTHS, **options), PLModuleInput), torch.randn(4, 12, channels))


@DARTS
def dense_encoder():
    options = {"input_dim": 1, "output_dim": 1, "future_cov_dim": 0, "static_cov_dim": 0, "nr_params": 1,
               "num_encoder_layers": 1, "num_decoder_layers": 1, "decoder_output_dim": 4, "hidden_size": 16,
               "temporal_decoder_hidden": 8, "temporal_width_past": 0, "temporal_width_future": 0,
               "temporal_hidden_size_past": 8, "temporal_hidden_size_future": 8, "use_layer_norm": False,
               "dropout": 0.1}  # fmt: skip
    return darts_module("tide_model", "_TideModule", 1, **options)


@DARTS
def transformer():
    options = {"input_size": 1, "output_size": 1, "nr_params": 1, "d_model": 16, "nhead": 4, "num_encoder_layers": 1,
               "num_decoder_layers": 1, "dim_feedforward": 32, "dropout": 0.1, "activation": "relu"}  # fmt: skip
    return darts_module("transformer_model", "_TransformerModule", 1, **options)


@DARTS
def temporal_convolution():
    options = {"input_size": 1, "kernel_size": 3, "num_filters": 4, "num_layers": 2, "dilation_base": 2,
               "target_size": 1, "nr_params": 1, "target_length": 4, "dropout": 0.2, "weight_norm": True}  # fmt: skip
    return darts_module("tcn_model", "_TCNModule", 1, **options)


@DARTS
def n_beats():
    options = {"input_dim": 1, "output_dim": 1, "nr_params": 1, "generic_architecture": True, "num_stacks": 2,
               "num_blocks": 1, "num_layers": 2, "layer_widths": [16, 16], "expansion_coefficient_dim": 4,
               "trend_polynomial_degree": 2, "batch_norm": False, "dropout": 0.1, "activation": "ReLU"}  # fmt: skip
    return darts_module("nbeats", "_NBEATSModule", 1, **options)


NF = specimen("neuralforecast")


def forecast(name: str, series: int = 1, **options) -> Specimen:
    import neuralforecast.models as models

    model = getattr(models, name)(h=4, input_size=12, **options)
    window = {"insample_y": torch.randn(4, 12, series), "insample_mask": torch.ones(4, 12, series)}
    return Specimen(model, (window | dict.fromkeys(("futr_exog", "hist_exog", "stat_exog")),))


@NF
def n_hits():
    return forecast("NHITS", dropout_prob_theta=0.1, mlp_units=[[16, 16]] * 3)


@NF
def inverted_transformer():
    return forecast("iTransformer", 3, n_series=3, hidden_size=16, n_heads=2, e_layers=1, d_ff=32, dropout=0.1)


@NF
def patch_transformer():
    return forecast("PatchTST", hidden_size=16, n_heads=2, encoder_layers=1, linear_hidden_size=32, patch_len=4,
                    stride=2, dropout=0.1)  # fmt: skip


@NF
def time_dense_encoder():
    return forecast("TiDE", hidden_size=16, decoder_output_dim=4, dropout=0.1)


@NF
def recurrent_network():
    return forecast("LSTM", encoder_hidden_size=16, decoder_hidden_size=16, encoder_dropout=0.1)


@NF
def temporal_fusion():
    return forecast("TFT", hidden_size=16, n_head=2, dropout=0.1)


TSAI = specimen("tsai")


def series_classifier(file: str, name: str, uncertain: tuple[str, ...] = (), **options) -> Specimen:
    import importlib

    without_compiled_operators()
    model = getattr(importlib.import_module(f"tsai.models.{file}"), name)(**options)
    return Specimen(model, torch.randn(4, 2, 16), uncertain)


@TSAI
def series_transformer():
    return series_classifier("TST", "TST", c_in=2, c_out=3, seq_len=16, d_model=16, n_heads=4, d_ff=32, n_layers=2)


@TSAI
def inception_time():
    return series_classifier("InceptionTime", "InceptionTime", ("fc.weight",), c_in=2, c_out=3, nf=4)


@TSAI
def recurrent_convolution():
    options = {"c_in": 2, "c_out": 3, "seq_len": 16, "hidden_size": 16, "fc_dropout": 0.1}
    return series_classifier("RNN_FCN", "LSTM_FCN", **options)


@TSAI
def patches():
    options = {"c_in": 2, "c_out": None, "seq_len": 16, "pred_dim": 4, "n_layers": 1, "n_heads": 2, "d_model": 16}
    return series_classifier("PatchTST", "PatchTST", **options, d_ff=32, patch_len=4, stride=4, dropout=0.1)


@TSAI
def image_like_transformer():
    options = {"c_in": 2, "c_out": 3, "seq_len": 16, "d_model": 16, "n_heads": 4, "depth": 2}
    return series_classifier("TSiTPlus", "TSiTPlus", **options, dropout=0.1, drop_path_rate=0.1)


@TSAI
def residual_series():
    return series_classifier("ResNet", "ResNet", ("fc.weight", "convblock3.0.weight"), c_in=2, c_out=3)


BRAIN = specimen("braindecode")


def brain_model(name: str, channels: int = 4, times: int = 256, **options) -> Specimen:
    without_compiled_operators()
    import braindecode.models as models

    model = getattr(models, name)(n_chans=channels, n_outputs=3, n_times=times, sfreq=64, **options)
    return Specimen(model, torch.randn(3, channels, times))


@BRAIN
def eeg_net():
    return brain_model("EEGNet")


@BRAIN
def shallow():
    return brain_model("ShallowFBCSPNet")


@BRAIN
def deep():
    return brain_model("Deep4Net", times=512)


@BRAIN
def eeg_conformer():
    return brain_model("EEGConformer", num_layers=1)


@BRAIN
def attention_temporal():
    return brain_model("ATCNet")


@BRAIN
def eeg_inception():
    return brain_model("EEGInceptionERP")


@BRAIN
def tidnet():
    return brain_model("TIDNet")

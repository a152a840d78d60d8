"""Models of tables, recommenders and graphs: rtdl, tabm, pytorch-widedeep, pytorch-tabnet, deepctr-torch, PyG."""

from __future__ import annotations

import torch
from specimen import Specimen, specimen, without_compiled_operators

RTDL = specimen("rtdl")


@RTDL
def perceptron():
    from rtdl_revisiting_models import MLP

    return Specimen(MLP(d_in=8, d_out=2, n_blocks=3, d_block=32, dropout=0.2), torch.randn(5, 8))


@RTDL
def residual():
    from rtdl_revisiting_models import ResNet

    model = ResNet(d_in=8, d_out=2, n_blocks=2, d_block=32, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.2,
                   dropout2=0.1)  # fmt: skip
    return Specimen(model, torch.randn(5, 8))


@RTDL
def feature_transformer():
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(n_cont_features=5, cat_cardinalities=[3, 4], d_out=2, n_blocks=2, d_block=16,
                          attention_n_heads=4, attention_dropout=0.2, ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0,
                          ffn_dropout=0.1, residual_dropout=0.1)  # fmt: skip
    return Specimen(model, (torch.randn(5, 5), torch.randint(0, 3, (5, 2))))


@RTDL
def periodic_embeddings():
    from rtdl_num_embeddings import PeriodicEmbeddings
    from rtdl_revisiting_models import MLP

    embeddings = PeriodicEmbeddings(6, 8, lite=False)
    network = MLP(d_in=48, d_out=2, n_blocks=2, d_block=32, dropout=0.2)
    model = torch.nn.Sequential(embeddings, torch.nn.Flatten(), network)
    return Specimen(model, torch.randn(5, 6), uncertain=("linear.weight",))


TABM = specimen("tabm")


def tabular_ensemble(**options) -> Specimen:
    from tabm import TabM

    model = TabM.make(n_num_features=5, cat_cardinalities=[3, 4], d_out=2, k=4, n_blocks=2, d_block=32, dropout=0.2,
                      **options)  # fmt: skip
    return Specimen(model, (torch.randn(5, 5), torch.randint(0, 3, (5, 2))))


@TABM
def ensemble():
    return tabular_ensemble()


@TABM
def mini_ensemble():
    return tabular_ensemble(arch_type="tabm-mini")


@TABM
def piecewise_linear():
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins

    bins = compute_bins(torch.randn(100, 5), n_bins=8)
    embeddings = PiecewiseLinearEmbeddings(bins, 8, activation=False, version="B")
    return tabular_ensemble(num_embeddings=embeddings)


WIDE = specimen("pytorch-widedeep")
COLUMNS = {name: i for i, name in enumerate(["a", "b", "c", "x", "y", "z"])}
CATEGORIES = [("a", 4, 8), ("b", 5, 8), ("c", 3, 8)]


def wide_and_deep(name: str, sized: bool, **options) -> Specimen:
    without_compiled_operators()
    import pytorch_widedeep.models as models

    categories = CATEGORIES if sized else [c[:2] for c in CATEGORIES]
    tabular = getattr(models, name)(column_idx=COLUMNS, cat_embed_input=categories, continuous_cols=["x", "y", "z"],
                                    **options)  # fmt: skip
    model = models.WideDeep(deeptabular=tabular, pred_dim=2)
    X = torch.cat([torch.randint(0, 4, (5, 3)).float(), torch.randn(5, 3)], 1)
    return Specimen(model, ({"deeptabular": X},))


@WIDE
def tab_mlp():
    return wide_and_deep("TabMlp", True, mlp_hidden_dims=[32, 16], mlp_dropout=0.2, cat_embed_dropout=0.1)


@WIDE
def tab_resnet():
    return wide_and_deep("TabResnet", True, blocks_dims=[32, 32, 16], blocks_dropout=0.2)


@WIDE
def tab_transformer():
    return wide_and_deep("TabTransformer", False, input_dim=16, n_heads=4, n_blocks=2)


@WIDE
def saint():
    return wide_and_deep("SAINT", False, input_dim=16, n_heads=2, n_blocks=1)


@WIDE
def ft_transformer():
    return wide_and_deep("FTTransformer", False, input_dim=16, n_heads=4, n_blocks=2)


@WIDE
def tab_perceiver():
    return wide_and_deep("TabPerceiver", False, input_dim=16, n_latents=4, latent_dim=16, n_cross_attn_heads=2,
                         n_latent_heads=2, n_latent_blocks=1, n_perceiver_blocks=1)  # fmt: skip


NET = specimen("pytorch-tabnet")


@NET
def tabnet():
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(6, 2, n_d=8, n_a=8, n_steps=2, group_attention_matrix=torch.eye(6))
    return Specimen(model, torch.randn(5, 6), uncertain=("final_mapping.weight",))


DEEP = specimen("deepctr-torch")


def click_model(name: str, **options) -> Specimen:
    import deepctr_torch.models as models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"s{i}", 10, 4) for i in range(3)] + [DenseFeat("d", 2)]
    model = getattr(models, name)(columns, columns, dnn_hidden_units=(16, 16), init_std=0.1, **options)
    X = torch.cat([torch.randint(0, 10, (5, 3)).float(), torch.randn(5, 2)], 1)
    return Specimen(model, X)


@DEEP
def deep_fm():
    return click_model("DeepFM", dnn_dropout=0.2)


@DEEP
def extreme_deep_fm():
    return click_model("xDeepFM", dnn_dropout=0.2)


@DEEP
def cross_network():
    return click_model("DCN", dnn_dropout=0.2)


@DEEP
def auto_interactions():
    return click_model("AutoInt", dnn_dropout=0.2)


@DEEP
def neural_fm():
    found = click_model("NFM", dnn_dropout=0.2)
    found.uncertain = ("embedding_dict.s0.weight",)
    return found


@DEEP
def feature_importance():
    return click_model("FiBiNET", dnn_dropout=0.2)


PYG = specimen("torch-geometric")


def graph_model(name: str, **options) -> Specimen:
    import torch_geometric.nn as gnn

    model = getattr(gnn, name)(4, 16, 2, 3, dropout=0.2, **options)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])
    edges = torch.cat([edges, edges.flip(0)], 1)
    return Specimen(model, (torch.randn(6, 4), edges), options={"batched": False})


@PYG
def gcn():
    return graph_model("GCN")


@PYG
def gat():
    return graph_model("GAT", heads=2)


@PYG
def graph_sage():
    return graph_model("GraphSAGE")


@PYG
def graph_isomorphism():
    return graph_model("GIN")

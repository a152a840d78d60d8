"""Image models of torchvision, timm, vit-pytorch, segmentation-models-pytorch and MONAI."""

from __future__ import annotations

import torch
from specimen import Specimen, specimen, without_compiled_operators

TV = specimen("torchvision")


def torchvision_model(name: str, size: int = 64, uncertain: tuple[str, ...] = (), **options) -> Specimen:
    without_compiled_operators()
    from torchvision import models

    return Specimen(models.get_model(name, weights=None, **options), torch.randn(2, 3, size, size), uncertain)


@TV
def efficientnet_b0():
    return torchvision_model("efficientnet_b0", num_classes=5)


@TV
def convnext_tiny():
    return torchvision_model("convnext_tiny", num_classes=5, layer_scale=0.5, stochastic_depth_prob=0.1)


@TV
def swin_t():
    without_compiled_operators()
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], dropout=0.1, stochastic_depth_prob=0.1, num_classes=5)
    return Specimen(model, torch.randn(2, 3, 32, 32))


@TV
def vision_transformer():
    without_compiled_operators()
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=5)
    return Specimen(model, torch.randn(3, 3, 32, 32))


@TV
def resnet18():
    return torchvision_model("resnet18", 32, ("layer4.1.conv2.weight", "fc.weight"), num_classes=5)


@TV
def mobilenet_v3_small():
    return torchvision_model("mobilenet_v3_small", 32, num_classes=5)


@TV
def vgg11():
    return torchvision_model("vgg11", 32, num_classes=5)


@TV
def densenet():
    without_compiled_operators()
    from torchvision.models.densenet import DenseNet

    return Specimen(DenseNet(8, (2, 2), 16, drop_rate=0.1, num_classes=5), torch.randn(3, 3, 32, 32))


@TV
def deeplabv3_resnet50():
    return torchvision_model("deeplabv3_resnet50", 32, num_classes=3, weights_backbone=None)


TIMM = specimen("timm")


def timm_model(name: str, size: int = 32, batch: int = 3, **options) -> Specimen:
    without_compiled_operators()
    import timm

    return Specimen(timm.create_model(name, num_classes=5, **options), torch.randn(batch, 3, size, size))


@TIMM
def vit():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1)


@TIMM
def convnext():
    return timm_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.2, drop_rate=0.1,
                      ls_init_value=0.5)  # fmt: skip


@TIMM
def swin():
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return timm_model("swin_tiny_patch4_window7_224", **sizes, drop_path_rate=0.1, proj_drop_rate=0.1)


@TIMM
def mixer():
    without_compiled_operators()
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(5, 32, patch_size=8, num_blocks=2, embed_dim=32, drop_path_rate=0.1, proj_drop_rate=0.1)
    return Specimen(model, torch.randn(3, 3, 32, 32))


@TIMM
def efficientnet():
    return timm_model("efficientnet_b0", drop_rate=0.2, drop_path_rate=0.2)


@TIMM
def resnet_drop_block():
    return timm_model("resnet10t", drop_rate=0.2, drop_path_rate=0.1)


@TIMM
def deit_distilled():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm_model("deit_tiny_distilled_patch16_224", **sizes, drop_path_rate=0.1)


VP = specimen("vit-pytorch")


@VP
def plain_transformer():
    without_compiled_operators()
    from vit_pytorch import ViT

    model = ViT(image_size=16, patch_size=4, num_classes=3, dim=32, depth=2, heads=4, mlp_dim=64, dropout=0.1,
                emb_dropout=0.1, dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


@VP
def cait():
    without_compiled_operators()
    from vit_pytorch.cait import CaiT

    model = CaiT(image_size=16, patch_size=4, num_classes=3, dim=32, depth=2, cls_depth=1, heads=4, mlp_dim=64,
                 dropout=0.1, emb_dropout=0.1, layer_dropout=0.1, dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


@VP
def compact_transformer():
    without_compiled_operators()
    from vit_pytorch.cct import CCT

    model = CCT(img_size=16, embedding_dim=32, n_conv_layers=1, kernel_size=3, stride=2, padding=1, num_layers=2,
                num_heads=4, mlp_ratio=2.0, num_classes=3, dropout_rate=0.1, stochastic_depth_rate=0.1)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


@VP
def convolutional_transformer():
    without_compiled_operators()
    from vit_pytorch.cvt import CvT

    sizes = {f"s{i}_{k}": v for i in (1, 2, 3) for k, v in {"emb_dim": 16, "depth": 1, "heads": 1}.items()}
    return Specimen(CvT(num_classes=3, **sizes, dropout=0.1), torch.randn(3, 3, 32, 32))


@VP
def deep_vit():
    without_compiled_operators()
    from vit_pytorch.deepvit import DeepViT

    model = DeepViT(image_size=16, patch_size=4, num_classes=3, dim=32, depth=2, heads=4, mlp_dim=64, dropout=0.1,
                    emb_dropout=0.1, dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


@VP
def parallel_branches():
    without_compiled_operators()
    from vit_pytorch.parallel_vit import ViT

    model = ViT(image_size=16, patch_size=4, num_classes=3, dim=32, depth=2, heads=4, mlp_dim=64, dropout=0.1,
                emb_dropout=0.1, dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


@VP
def video_transformer():
    without_compiled_operators()
    from vit_pytorch.vivit import ViViT

    model = ViViT(image_size=16, frames=4, image_patch_size=8, frame_patch_size=2, num_classes=3, dim=32,
                spatial_depth=1, temporal_depth=1, heads=4, mlp_dim=64, dropout=0.1, emb_dropout=0.1,
                dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 4, 16, 16))


@VP
def cross_covariance():
    without_compiled_operators()
    from vit_pytorch.xcit import XCiT

    model = XCiT(image_size=16, patch_size=4, num_classes=3, dim=32, depth=2, cls_depth=1, heads=4, mlp_dim=64,
                 dropout=0.1, emb_dropout=0.1, local_patch_kernel_size=3, dim_head=8)  # fmt: skip
    return Specimen(model, torch.randn(3, 3, 16, 16))


SMP = specimen("segmentation-models-pytorch")


def segmentation_model(name: str, uncertain: tuple[str, ...], encoder: str = "resnet18", **options) -> Specimen:
    without_compiled_operators()
    import segmentation_models_pytorch

    build = getattr(segmentation_models_pytorch, name)
    model = build(encoder_name=encoder, encoder_weights=None, classes=2, **options)
    return Specimen(model, torch.randn(2, 3, 32, 32), uncertain)


@SMP
def unet():
    return segmentation_model("Unet", ("segmentation_head.0.weight", "blocks.4.conv1.0.weight"))


@SMP
def fpn():
    return segmentation_model("FPN", ())


@SMP
def deeplab_plus():
    return segmentation_model("DeepLabV3Plus", ())


@SMP
def linknet():
    return segmentation_model("Linknet", ("segmentation_head.0.weight",))


@SMP
def psp_net():
    return segmentation_model("PSPNet", (), psp_dropout=0.2)


MONAI = specimen("monai")


def volumes(channels: int = 1, size: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, size)


@MONAI
def unet_2d():
    from monai.networks.nets import UNet

    model = UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, dropout=0.1)
    return Specimen(model, torch.randn(2, 1, 32, 32))


@MONAI
def unet_3d():
    from monai.networks.nets import UNet

    return Specimen(UNet(3, 1, 2, (4, 8), (2,), num_res_units=1, dropout=0.1), volumes())


@MONAI
def segresnet():
    from monai.networks.nets import SegResNet

    model = SegResNet(2, 8, 1, 2, dropout_prob=0.2, blocks_down=(1, 1), blocks_up=(1,))
    return Specimen(model, torch.randn(2, 1, 32, 32))


@MONAI
def unetr():
    from monai.networks.nets import UNETR

    model = UNETR(1, 2, 32, feature_size=4, hidden_size=48, mlp_dim=64, num_heads=4, dropout_rate=0.1, spatial_dims=2)
    return Specimen(model, torch.randn(2, 1, 32, 32))


@MONAI
def swin_unetr():
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(1, 2, patch_size=2, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=4, feature_size=12,
                      drop_rate=0.1, dropout_path_rate=0.1, spatial_dims=2)  # fmt: skip
    return Specimen(model, torch.randn(2, 1, 64, 64))


@MONAI
def densenet_2d():
    from monai.networks.nets import DenseNet

    model = DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2), dropout_prob=0.1)
    return Specimen(model, torch.randn(3, 1, 32, 32))


@MONAI
def attention_unet():
    from monai.networks.nets import AttentionUnet

    model = AttentionUnet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), dropout=0.1)
    return Specimen(model, torch.randn(2, 1, 32, 32))


@MONAI
def vnet():
    from monai.networks.nets import VNet

    model = VNet(2, 1, 2, dropout_prob_down=0.3, dropout_prob_up=(0.3, 0.3))
    return Specimen(model, torch.randn(2, 1, 32, 32))

"""The declarations of multi-token prediction modules (DeepSeek-AI 2024, section 2.2)."""

from megajax.layout.extra_layers import ExtraLayers

MTP = "mtp"  # the blocks of the modules
MODULES = ExtraLayers(MTP, "mtp_layers", "mtp_loss_weight", "multi-token prediction")

"""CUDA graphs as plans: made, verified and drawn without a GPU. Torch-free."""

from meshwright.capture.plan import CaptureMode, CapturePlan, plan_capture
from meshwright.capture.signature import LayerSignature, TensorSignature
from meshwright.capture.verify import verify_capture

__all__ = ["CaptureMode", "CapturePlan", "LayerSignature", "TensorSignature", "plan_capture", "verify_capture"]

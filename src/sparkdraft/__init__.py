"""sparkdraft: trains speculative-decoding drafts for one NVIDIA DGX Spark, exports them for vLLM, and judges them."""

__version__ = "0.1.0"

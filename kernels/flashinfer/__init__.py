"""FlashInfer's paged attention under the contract of `kernels.attention.paged_attention`; needs the extra `cuda`."""

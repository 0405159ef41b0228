"""Wrong attentions, one for each way in which kernels were wrong, and the checks that find them."""

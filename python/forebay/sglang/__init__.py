"""Forebay in SGLang: `forebay.sglang.hicache` keeps pages of HiCache with the node of the host."""

"""Judging a draft: the engines that decode with it and count what the target accepts."""

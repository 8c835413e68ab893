"""Texts as tokens: tokenizers, templates of conversations, prompts with their responses."""

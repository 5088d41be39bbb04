"""Records of any layout to token ids, with what of them is trained: texts, chats, prompts and ready tokens."""

"""From conversations to tokens through the chat template of a model, with marks on those that count."""

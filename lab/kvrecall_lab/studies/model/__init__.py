"""How `models/recall-tiny` is made: tasks, tokenizer, training, evaluation, export."""

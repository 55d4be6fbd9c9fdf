"""An engine whose device cache holds forty blocks, asked for everything at once."""

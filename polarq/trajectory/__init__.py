"""From captured completions to what a trainer trains on."""

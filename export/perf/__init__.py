"""Speed and memory of exported models, measured side by side in one run (`cbmir speed`)."""

"""Published weights: names and layouts that models of Hugging Face have in files, and their configs."""

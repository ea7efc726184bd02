"""What does a step repeat, so that it need not be run again: blocks that are equal, and micro batches?"""

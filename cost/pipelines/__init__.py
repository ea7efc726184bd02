"""What do ranks with stages of a model do, and when, where one waits for another?"""

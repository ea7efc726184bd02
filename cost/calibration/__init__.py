"""How fast is this machine, measured and written as a profile?"""

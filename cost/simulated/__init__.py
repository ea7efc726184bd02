"""What does a program do on an accelerator that is not there, as one rank of many?"""

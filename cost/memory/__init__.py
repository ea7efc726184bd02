"""How much memory does a trace need: for its storages, in the caching allocator, and of the device in all?"""

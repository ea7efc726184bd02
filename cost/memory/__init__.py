"""Device memory of a trace: active, reserved by the caching allocator, and in total."""

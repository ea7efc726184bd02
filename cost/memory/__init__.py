"""Memory of a trace: active, reserved by the caching allocator, and taken of the device in all."""

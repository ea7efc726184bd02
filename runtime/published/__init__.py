"""Published weights in a run: folders of safetensors files, the map to a model's tensors, their reading and export."""

"""Files of measurements, and interpolation between measured sizes."""

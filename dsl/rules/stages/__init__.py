"""Rules about pipelines: schedules, stages, and treatments that differ between stages."""

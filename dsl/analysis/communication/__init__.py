"""Schedules of collectives: units that share them, and their places by the times of a traced step."""

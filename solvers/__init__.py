"""Schedules for tensor rematerialization.  No TensorFlow in here."""

"""Tests of the traffic: settings, arrivals, lengths, traces, schedules."""

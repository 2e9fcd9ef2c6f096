"""Health checks of data and model: what looks wrong, and the option that would fix it."""

from atoll.health.data import DataScan, check_data, scan_data
from atoll.health.finding import Finding
from atoll.health.measure import HealthResult, HealthSettings
from atoll.health.model import check_model

__all__ = ["DataScan", "Finding", "HealthResult", "HealthSettings", "check_data", "check_model", "scan_data"]

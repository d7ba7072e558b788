"""The report: one self-contained HTML page about one run or several."""

from groupwise.report.write import ReportFile, write_report

__all__ = ["ReportFile", "write_report"]

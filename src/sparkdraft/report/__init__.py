"""Reports: tables, plots and pages made from stored counts; no model is run here."""

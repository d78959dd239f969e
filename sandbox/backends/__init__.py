"""Where sandboxes come from; `local` needs neither a daemon nor root."""

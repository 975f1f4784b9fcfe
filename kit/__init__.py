"""What every room shares and no room owns: units, errors, findings, the component protocol."""

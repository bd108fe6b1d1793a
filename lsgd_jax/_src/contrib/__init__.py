"""Methods of single recent papers, one file each; they may change with the evidence."""

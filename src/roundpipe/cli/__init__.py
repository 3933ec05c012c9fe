"""The command line: roundpipe train and roundpipe doctor."""

"""The file store behind `/v1/files`: blobs in a shared folder, what is known of them on the control Redis."""

"""Small programs that run under tf.distribute and under mpidist, and are compared.

`programs` has them, each written once for an `adapter.Adapter`; `on_tensorflow` and
`on_mpidist` are the two sides, and nothing else imports TensorFlow or mpidist.
`results` turns what a program returns into plain data and compares. `sides` starts the
processes, and `report` writes docs/conformance.md. ``python tests/conformance`` is the
command line of it all.
"""

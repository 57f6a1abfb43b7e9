"""The buffer: prompts out on lease, finished groups in, batches to the learner, all of it durable.

            prompt lease                    trajectory group (ack after durable insert)
buffer  ────────────────▶  rollout server  ────────────────▶  buffer  ───batch──▶  learner
"""

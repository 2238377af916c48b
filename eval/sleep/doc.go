// Package sleep measures how long models take to sleep and to wake, by level, with the share of the
// copies in it, and how long a switch from one model to another takes.
//
//	err := sleep.Measure(ctx, sleep.Options{Models: engines, Levels: []int{1, 2}, Trials: 5}, result)
//	err = sleep.WriteTable(os.Stdout, result)
//
// The first sleep of each model at level 1 is a measurement of its own: it allocates the pinned host
// memory that later ones find.
//
// # What it is not
//
// It opens no model and knows nothing of memory: Engine sleeps and wakes.
//
// # Invariants
//
//   - At most one model is awake at a time.
//   - After each wake the model's tokens are compared with those from before, where memory holds
//     bytes; others than those are an error.
package sleep

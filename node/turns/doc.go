// Package turns lets several models use one GPU in turns: one is awake, and the others sleep, until
// requests come for them.
//
//	r, err := turns.NewRunner(turns.Options{Turn: 10 * time.Second, Models: models, Awake: 0})
//	go r.Run(ctx)
//	r.Notify() // a request has come for a model
//
// Core is the pure part: it decides when the model that is awake goes to sleep, and which is woken.
// Runner carries it out.
//
// # Rules
//
//   - A model that is awake stays awake until requests wait for another one.
//   - Its turn then ends when it has had no requests for Linger: in that time the clients that it has
//     just served may send their next ones, for each of which a switch would otherwise be made.
//   - With requests its turn ends Turn after its wake. From then on no request is admitted; those that
//     run finish, for another Turn at most, and are then preempted: they go on in the next turn.
//   - Then that model is woken whose requests have waited longest.
//
// So a request for a sleeping model waits for at most two Turns and a switch for each model whose
// requests have waited longer, one more for the model that is awake, and a model that has
// requests all the time loses at most a switch in each Turn.
//
// # What it is not
//
// It knows nothing of memory, devices or HTTP: it calls Sleep and Wake of Model, and asks for its
// load.
//
// # Invariants
//
//   - At most one model is awake or waking, and none is woken before the one before it sleeps.
//   - A model with requests is woken within a bounded time, if waking works.
//   - After a failed Sleep or Wake the next one is tried after Retry, another waiting model first.
package turns

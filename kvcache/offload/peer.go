package offload

import "errors"

func openPeers(e Env, c Config) (*Medium, error) { return nil, errors.New("not yet") }

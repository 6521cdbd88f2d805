package lease

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

// KeptFile is the file of the state directory that has the configuration of the network as it was last read, so that a node goes on
// with it also where etcd is away, or empty, when the agent starts.
const KeptFile = "network.json"

// kept is its content.
type kept struct {
	Prefix string `json:"prefix"`
	Config []byte `json:"config"`
}

// askAgain is when a configuration that is missing, wrong or out of reach is looked for again.
const askAgain = time.Second

// errNoConfig says that there is no configuration of the network.
var errNoConfig = errors.New("is missing; waiting for it")

// Network reads the configuration of the network, and waits until there is one that can be used: said is told each time why there is
// none. With the one of before, which is in the state directory, nothing is waited for.
func (r *Registry) Network(ctx context.Context, stateDir string, said func(error)) (Network, error) {
	path := filepath.Join(stateDir, KeptFile)
	for {
		n, text, err := r.readNetwork(ctx)
		if err == nil {
			r.keep(path, text)
			return n, nil
		}
		if ctx.Err() != nil {
			return n, ctx.Err()
		}
		said(err)
		if n, ok := r.recall(path); ok {
			return n, nil
		}
		select {
		case <-ctx.Done():
			return n, ctx.Err()
		case <-time.After(askAgain):
		}
	}
}

// readNetwork reads the configuration.
func (r *Registry) readNetwork(ctx context.Context) (n Network, text []byte, err error) {
	err = r.asked(ctx, func(ctx context.Context) error {
		answer, err := r.client.Get(ctx, r.configKey())
		if err == nil && len(answer.Kvs) > 0 {
			text = answer.Kvs[0].Value
		}
		return err
	})
	if err != nil {
		return n, nil, err
	}
	n, err = r.parseNetwork(text)
	return n, text, err
}

func (r *Registry) parseNetwork(text []byte) (n Network, err error) {
	err = errNoConfig
	if text != nil {
		n, err = ParseNetwork(text)
	}
	if err != nil {
		return n, fmt.Errorf("etcd key %s: %w", r.configKey(), err)
	}
	return n, nil
}

func (r *Registry) keep(path string, text []byte) {
	content, err := json.Marshal(kept{r.Prefix, text})
	if err == nil {
		err = install.Replace(path, 0o600, bytes.NewReader(content))
	}
	if err != nil {
		r.log.Warn("the network's configuration can't be kept for a start without etcd", "error", err)
	}
}

func (r *Registry) recall(path string) (n Network, ok bool) {
	content, err := os.ReadFile(path) //nolint:gosec // the path is the administrator's
	var k kept
	if err != nil || json.Unmarshal(content, &k) != nil || k.Prefix != r.Prefix {
		return n, false
	}
	n, err = ParseNetwork(k.Config)
	return n, err == nil
}

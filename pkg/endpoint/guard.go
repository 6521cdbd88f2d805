package endpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
)

// GuardFile is the file in the state directory in which the agent lists the node's own ports beside guard.Fixed.
const GuardFile = "guarded-ports.json"

// guardContent is the content of GuardFile.
type guardContent struct {
	Ports guard.Ports `json:"ports"`
}

// EncodeGuard returns the content of GuardFile.
func EncodeGuard(ports guard.Ports) ([]byte, error) {
	content, err := json.Marshal(guardContent{ports})
	if err != nil {
		return nil, fmt.Errorf("encode guarded ports: %w", err)
	}
	return append(content, '\n'), nil
}

// ReadGuard returns the node's own ports: guard.Fixed, and those that an agent has listed. With an error it returns guard.Fixed.
func ReadGuard(stateDir string) (guard.Ports, error) {
	ports := guard.Fixed()
	content, err := os.ReadFile(filepath.Join(stateDir, GuardFile)) //nolint:gosec // the path is the administrator's
	if errors.Is(err, fs.ErrNotExist) {
		return ports, nil // no agent has run yet
	}
	if err != nil {
		return ports, fmt.Errorf("read guarded ports: %w", err)
	}
	var listed guardContent
	if err := json.Unmarshal(content, &listed); err != nil {
		return ports, fmt.Errorf("read guarded ports from %s: %w", GuardFile, err)
	}
	return append(ports, listed.Ports...), nil
}

// keepGuarded fails with a *HostPortTakenError when ADD asks for a port that is the node's own.
func (w *Work) keepGuarded() error {
	guarded, err := ReadGuard(w.StateDir)
	if err != nil { // a damaged file must keep no pod from its node; the agent writes the file anew
		w.log().Warn("the list of guarded ports can't be read, the fixed ports alone are guarded", "error", err)
	}
	for _, h := range w.HostPorts {
		if h.Protocol != "tcp" {
			continue
		}
		if p, found := guarded.Find(h.Address, h.Port); found {
			return &HostPortTakenError{HostPort: h, Holder: p.Owner}
		}
	}
	return nil
}

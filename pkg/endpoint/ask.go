package endpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// HostPortsFile is the file in the state directory that says that a pod has asked for a host port since the node
// booted: from then on the agent's programs serve them.
const HostPortsFile = "host-ports"

// IgnoredFile is the file in the state directory in which ADD notes which fields of which network's configuration it has
// said that it ignores, since the node booted.
const IgnoredFile = "ignored-fields"

// AskForHostPorts asks the agent to have the programs serve host ports, for as long as the node is up. The error matches
// ErrNoDataplane where there is no state directory.
func AskForHostPorts(stateDir string) error {
	f, err := os.OpenFile(filepath.Join(stateDir, HostPortsFile), os.O_WRONLY|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err == nil {
		err = f.Close()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: no state directory: %w", ErrNoDataplane, err)
	case err != nil:
		return fmt.Errorf("ask for host ports: %w", err)
	}
	return nil
}

// HostPortsAsked reports whether a pod has asked for a host port.
func HostPortsAsked(stateDir string) bool {
	_, err := os.Stat(filepath.Join(stateDir, HostPortsFile))
	return err == nil
}

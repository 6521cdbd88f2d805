package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// apiServersName is the file of the state directory with the addresses of API servers that have worked, so that a start needs no
// Service to reach one.
const apiServersName = "api-servers.json"

// keptServers is its content.
type keptServers struct {
	Servers []string `json:"servers"`
}

// ParseAPIServer checks an address of --api-server, and returns it with its port.
func ParseAPIServer(text string) (string, error) { return source.ParseServer(text) }

// reachAPI makes of what the flags say the API servers that all goes by.
func (n *node) reachAPI() error {
	if n.cfg.API == nil {
		return nil
	}
	path := filepath.Join(n.cfg.State, apiServersName)
	kept, err := readServers(path)
	if err != nil { // nothing depends on it where there is another way
		n.log.Warn("the kept addresses of API servers can't be used", "error", err)
	}
	n.api, err = source.NewServers(n.cfg.API, source.ServersOptions{
		Given: n.cfg.APIServers, OfService: n.cfg.servesServices() && n.cfg.APIOfService, Kept: kept, Log: n.log,
		Keep: func(all []string) error {
			err := writeServers(path, all)
			n.complaints.note("source/API servers to keep", err)
			return err
		},
	})
	if err == nil {
		n.cfg.API = n.api.Config()
	}
	return err
}

func readServers(path string) ([]string, error) {
	content, err := os.ReadFile(path) //nolint:gosec // the path is the administrator's
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var kept keptServers
	if err := json.Unmarshal(content, &kept); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return kept.Servers, nil
}

func writeServers(path string, all []string) error {
	content, err := json.Marshal(keptServers{all})
	if err != nil {
		return fmt.Errorf("encode the addresses of API servers: %w", err)
	}
	if err := replaceFile(path, append(content, '\n')); err != nil {
		return fmt.Errorf("keep the addresses of API servers: %w", err)
	}
	return nil
}

// addressesOfAPI are where the API servers are reached; none: at names, or there are none.
func (n *node) addressesOfAPI() []netip.AddrPort {
	if n.api == nil {
		return nil
	}
	return n.api.Addresses()
}

// describeAPI says which API server is in use; empty: there is none to use.
func (n *node) describeAPI() string {
	if n.api == nil {
		return ""
	}
	s := n.api.State()
	switch {
	case s.InUse == "":
		return fmt.Sprintf("none of %d answers", s.Known)
	case s.Known == 1:
		return s.InUse
	}
	return fmt.Sprintf("%s, one of %d", s.InUse, s.Known)
}

package modes

import (
	"path"
	"path/filepath"
)

// Sysctls are the first node's, by their names under /proc/sys; without those that it has not.
func (n *Network) Sysctls(names ...string) map[string]string {
	found := map[string]string{}
	for _, name := range names {
		if value, err := n.lab.Nodes[0].ReadSysctl(name); err == nil {
			found[name] = value
		}
	}
	return found
}

// Binaries are the files that the mode's plugins, and its agent, were started from.
func (n *Network) Binaries() (files []string, err error) {
	if n.Mode == Direct {
		return nil, nil
	}
	ours, err := n.lab.Binary("ebpf-cni")
	if err != nil {
		return nil, err
	}
	if n.Mode == EBPF {
		return []string{ours, filepath.Join(filepath.Dir(ours), "ebpf-agent")}, nil
	}
	for _, plugin := range upstream {
		files = append(files, filepath.Join(filepath.Dir(ours), "upstream", path.Base(plugin)))
	}
	return files, nil
}

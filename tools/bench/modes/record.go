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
	for _, name := range binaries(n.Mode) {
		file, err := n.lab.Binary(name)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	if len(files) == 0 {
		return nil, nil
	}
	beside := filepath.Join(filepath.Dir(files[0]), "upstream")
	switch n.Mode {
	case EBPF:
		return files, nil
	case EBPFKubeProxy:
		return append(files, filepath.Join(beside, "portmap")), nil
	}
	files = nil // they serve to find upstream's only
	for _, plugin := range upstream {
		files = append(files, filepath.Join(beside, path.Base(plugin)))
	}
	return files, nil
}

package main

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// wanted are the modules that the suites and the product use. Each is a module of the kernel, or built in; those with a
// question mark may be missing.
var wanted = []string{
	"?crc32c_generic", // libcrc32c asks for it by another name, which nobody resolves in the machine
	"veth", "bridge", "dummy", "vxlan",
	"sch_ingress", "cls_bpf", "cls_matchall", "act_gact",
	"nf_conntrack", "nf_conntrack_netlink", "nf_nat", "nf_tables", "?iptable_nat",
	// For the tests through IPsec, and what the kernel's own tools would load for them.
	"?xfrm_user", "?xfrm_algo", "?esp4", "?esp6", "?gcm", "?ctr", "?ghash_generic", "?aes_generic", "?crypto_null", "?seqiv",
	"?hmac", "?sha512_generic", "?sha256_generic", "?drbg",
	// By which the agent ends sockets, and the plugin finds those that have a port.
	"udp_diag", "tcp_diag",
	// For pods that speak them.
	"?ip_gre", "?ip6_gre", "?sctp",
	// Links without an Ethernet header.
	"tun", "?ipip", "?wireguard",
}

// moduleTree are the modules of one kernel: a directory such as /lib/modules/6.1.0-56-amd64, or one above it. depmod need
// not have been there: who needs whom stands in the modules.
type moduleTree struct {
	files   map[string]string // by name
	builtin map[string]bool
	open    func(path string) (content []byte, needs []string, err error)
}

func openModules(dir string) (*moduleTree, error) {
	t := &moduleTree{files: make(map[string]string), builtin: make(map[string]bool), open: openModule}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if name, ok := moduleName(path); ok {
			t.files[name] = path
		}
		if d.Name() == "modules.builtin" {
			return t.readBuiltin(path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	if len(t.builtin) == 0 {
		return nil, fmt.Errorf("list modules: no modules.builtin below %s: it must be what `make modules_install` makes, such as /lib/modules/VERSION", dir)
	}
	return t, nil
}

// moduleName is the kernel's name of a module file, whatever its compression.
func moduleName(path string) (string, bool) {
	name, _, ok := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(name, "-", "_"), ok
}

func (t *moduleTree) readBuiltin(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if name, ok := moduleName(s.Text()); ok {
			t.builtin[name] = true
		}
	}
	return s.Err()
}

// module is one to load, decompressed.
type module struct {
	file    string
	content []byte
}

// closure returns the named modules and all that they need, each after those that it needs.
func (t *moduleTree) closure(names []string) ([]module, error) {
	var out []module
	done := make(map[string]bool)
	var add func(name, why string) error
	add = func(name, why string) error {
		optional := strings.HasPrefix(name, "?")
		name = strings.ReplaceAll(strings.TrimPrefix(name, "?"), "-", "_")
		if done[name] || t.builtin[name] {
			return nil
		}
		done[name] = true
		path, ok := t.files[name]
		if !ok && optional {
			return nil
		}
		if !ok {
			return fmt.Errorf("kernel module %s is neither built in nor there (%s)", name, why)
		}
		content, needs, err := t.open(path)
		if err != nil {
			return fmt.Errorf("read kernel module %s: %w", path, err)
		}
		for _, need := range needs {
			if err := add(need, "needed by "+name); err != nil {
				return err
			}
		}
		out = append(out, module{name + ".ko", content})
		return nil
	}
	for _, name := range names {
		if err := add(name, "wanted by the tests"); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// openModule returns a module, decompressed, and which others it needs.
func openModule(path string) ([]byte, []string, error) {
	content, err := readModule(path)
	if err != nil {
		return nil, nil, err
	}
	needs, err := depends(content)
	return content, needs, err
}

// depends reads from a module which others it needs.
func depends(content []byte) ([]string, error) {
	list, err := modinfo(content, "depends")
	if err != nil || list == "" {
		return nil, err
	}
	return strings.Split(list, ","), nil
}

// readModule reads a module file and decompresses it; init has no program that could.
func readModule(path string) ([]byte, error) {
	tool := map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"}[filepath.Ext(path)]
	if tool == "" {
		return os.ReadFile(path)
	}
	out, err := exec.Command(tool, "-dc", path).Output()
	if err != nil {
		return nil, fmt.Errorf("decompress it with %s: %w", tool, err)
	}
	return out, nil
}

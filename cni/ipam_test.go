package cni

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// ipamName is another ipam plugin, for the tests: it answers with the content of the file "answer" in its directory
// and adds each command that it gets to the file "commands".
const ipamName = "fake-ipam"

func runFakeIPAM() {
	dir := os.Getenv(fakeIPAM)
	verb := os.Getenv("CNI_COMMAND")
	_, _ = io.ReadAll(os.Stdin)
	if verb == "VERSION" {
		fmt.Println(`{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}`)
		return
	}
	f, err := os.OpenFile(filepath.Join(dir, "commands"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		os.Exit(1)
	}
	fmt.Fprintln(f, verb, os.Getenv("CNI_CONTAINERID"), os.Getenv("CNI_IFNAME"))
	f.Close()
	if refusal, err := os.ReadFile(filepath.Join(dir, "refuse-"+verb)); err == nil {
		_, _ = os.Stdout.Write(refusal)
		os.Exit(1)
	}
	if verb == "ADD" {
		answer, err := os.ReadFile(filepath.Join(dir, "answer"))
		if err != nil {
			os.Exit(1)
		}
		_, _ = os.Stdout.Write(answer)
	}
}

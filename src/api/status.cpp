// SPDX-License-Identifier: Apache-2.0
#include "core/status.hpp"

extern "C" {

const char *fw_version(void) { return "0.1.0"; }

const char *fw_status_name(fw_status status) {
  switch (status) {
    case FW_OK: return "FW_OK";
    case FW_INVALID_ARGUMENT: return "FW_INVALID_ARGUMENT";
    case FW_UNSUPPORTED: return "FW_UNSUPPORTED";
    case FW_OUT_OF_MEMORY: return "FW_OUT_OF_MEMORY";
    case FW_WORKSPACE_TOO_SMALL: return "FW_WORKSPACE_TOO_SMALL";
    case FW_DEVICE_ERROR: return "FW_DEVICE_ERROR";
    case FW_INTERNAL: return "FW_INTERNAL";
    default: return "FW_STATUS_UNKNOWN";
  }
}

const char *fw_last_error(void) { return fw::last_error(); }
const char *fw_last_impl(void) { return fw::last_impl(); }

}  // extern "C"

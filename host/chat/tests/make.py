"""Writes cases.json: chats rendered by transformers with templates of the kinds that models have.

    pip install transformers jinja2
    python3 host/chat/tests/make.py > host/chat/tests/cases.json
"""
import json

from transformers.utils.chat_template_utils import _compile_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": (
        "{%- if tools %}\n"
        "    {{- '<|im_start|>system\\n' }}\n"
        "    {%- if messages[0].role == 'system' %}\n"
        "        {{- messages[0].content + '\\n\\n' }}\n"
        "    {%- endif %}\n"
        "    {{- \"# Tools\\n<tools>\" }}\n"
        "    {%- for tool in tools %}\n"
        "        {{- \"\\n\" }}\n"
        "        {{- tool | tojson }}\n"
        "    {%- endfor %}\n"
        "    {{- \"\\n</tools><|im_end|>\\n\" }}\n"
        "{%- else %}\n"
        "    {%- if messages[0]['role'] == 'system' %}\n"
        "        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
        "    {%- else %}\n"
        "        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}\n"
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "    {%- elif message.role == \"assistant\" %}\n"
        "        {{- '<|im_start|>' + message.role }}\n"
        "        {%- if message.content %}\n"
        "            {{- '\\n' + message.content }}\n"
        "        {%- endif %}\n"
        "        {%- for tool_call in message.tool_calls %}\n"
        "            {%- if tool_call.function is defined %}\n"
        "                {%- set tool_call = tool_call.function %}\n"
        "            {%- endif %}\n"
        "            {{- '\\n<tool_call>\\n{\"name\": \"' }}\n"
        "            {{- tool_call.name }}\n"
        "            {{- '\", \"arguments\": ' }}\n"
        "            {{- tool_call.arguments | tojson }}\n"
        "            {{- '}\\n</tool_call>' }}\n"
        "        {%- endfor %}\n"
        "        {{- '<|im_end|>\\n' }}\n"
        "    {%- elif message.role == \"tool\" %}\n"
        "        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != \"tool\") %}\n"
        "            {{- '<|im_start|>user' }}\n"
        "        {%- endif %}\n"
        "        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\n"
        "        {%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") %}\n"
        "            {{- '<|im_end|>\\n' }}\n"
        "        {%- endif %}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{%- endif %}\n"
    ),
    "headers": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "inst": (
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content'] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n"
        "{%- else %}\n"
        "    {%- set loop_messages = messages %}\n"
        "{%- endif %}\n"
        "{{- bos_token }}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}\n"
        "    {%- endif %}\n"
        "    {%- if message['role'] == 'user' %}\n"
        "        {%- if loop.first and system_message is defined %}\n"
        "            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}\n"
        "        {%- else %}\n"
        "            {{- ' [INST] ' + message['content'] + ' [/INST]' }}\n"
        "        {%- endif %}\n"
        "    {%- elif message['role'] == 'assistant' %}\n"
        "        {{- ' ' + message['content'] + eos_token}}\n"
        "    {%- else %}\n"
        "        {{- raise_exception('Only user and assistant roles are supported') }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
    ),
    "turns": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "generation": (
        "{% for message in messages %}\n"
        "{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'].strip() + eos_token }}\n"
        "{%- elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'].split('</think>')[-1].lstrip('\\n') + eos_token }}{% endgeneration %}\n"
        "{% else %}\n"
        "{% continue %}\n"
        "{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n"
        "{{ '<|assistant|>' }}\n"
        "{% endif %}\n"
        "{% endfor %}"
    ),
    "parts": (
        "{% for message in messages %}{{ '<' ~ message.role ~ '>' }}"
        "{% if message.content is string %}{{ message.content }}"
        "{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for call in message.tool_calls %}{{ call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')' }}{% endfor %}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "values": (
        "{{ true }} {{ tools is none }} {{ (messages | length > 1) ~ ';' }} {{ 3 | string }} {{ 1.5 ~ 2 }} {{ missing }}"
        "{{ messages[1:] | length }} {{ (messages | map(attribute='role') | list)[::-1] | join(' ') }} {{ 'a' * 3 + 'b' }} "
        "{{ ([1] + [2] * 2) | tojson }} {% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}"
        "{% endfor %}{{ ns.l | unique | join('+') }} {% macro twice(a, b='c') %}{{ a }}{{ a }}{{ b }}{% endmacro %}"
        "{{ twice('x') }}{{ twice('y', b=false) }} {% set text %}{{ messages[0].role }}{% endset %}{{ text | upper }} "
        "{{ dict(a=1) | tojson }} {{ 'x' if messages[0].name is defined }}"
    ),
    "date": (
        "{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}"
        "{{ ns.count }} {{ messages | length }} {{ messages[-1].content[::-1] }} {{ messages[0].get('name', 'nobody') }} "
        "{{ messages | map(attribute='role') | join(', ') }} {{ messages[0].items() | list | length }} "
        "{{ ['a', 'b'] | tojson(indent=2) }} {{ messages[0] | tojson }}"
    ),
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER, OTHER = {"role": "user", "content": " What is <2+2>? "}, {"role": "user", "content": "Größer & 'quoted'\n"}
FOUR, MORE = {"role": "assistant", "content": "4."}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nMore.\n"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": [1.5, None, True, "ü"]}}}]}
NULL = {**CALL, "content": None}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]}
TOOL = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <a> & 'b'.", "parameters": {"type": "object"}}}]
CHATS = [
    ([USER], None), ([USER, FOUR], None), ([SYSTEM, USER, FOUR], None), ([SYSTEM, USER, FOUR, OTHER, MORE], None),
    ([USER, CALL, TOOL, FOUR], TOOLS), ([USER, USER], None), ([PARTS, NULL, TOOL, FOUR], TOOLS),
]

cases = []
for name, template in TEMPLATES.items():
    compiled = _compile_jinja_template(template)
    # Other templates write a list as Python does, or do not take it.
    for messages, tools in CHATS if name == "parts" else CHATS[:-1]:
        for prompt in [False, True]:
            try:
                text = compiled.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **TOKENS)
            except Exception as error:
                text = {"error": str(error)}
            cases.append({"template": name, "messages": messages, "tools": tools, "add_generation_prompt": prompt, "text": text})
print(json.dumps({"templates": TEMPLATES, "tokens": TOKENS, "cases": cases}, indent=1, ensure_ascii=False))
